"""Workers that are forks: functions launched from a notebook or a script."""
