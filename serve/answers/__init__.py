"""From a checked body to the engine, and from its outputs to one answer or to events."""
