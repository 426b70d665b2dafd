"""What a server says of itself: metrics, lines in the log, the acceptance alarm, the watchdog."""
