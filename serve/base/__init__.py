"""What all routes share: settings, errors, ids, server-sent events, the engine with what belongs to it."""
