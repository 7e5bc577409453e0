"""rltctl and the control socket."""
