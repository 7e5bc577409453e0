"""Running a planned tick on a device."""
