"""Links between processes: inboxes, addresses, the pipe to the supervisor."""
