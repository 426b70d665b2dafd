"""Reports of a server about itself: metrics, lines in the log, the acceptance alarm, the watchdog."""
