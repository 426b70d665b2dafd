"""Objects that all routes share: settings, errors, ids, server-sent events, the engine and its state."""
