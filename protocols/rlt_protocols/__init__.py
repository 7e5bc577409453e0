"""Messages between the processes of rlt. Nothing here imports torch or opens a socket."""

#: Raised with every change of a message that an older process would misread; compared in the start-up hello.
PROTOCOL_VERSION = 2
