"""Drafters: pure functions over a state of their own. The rest knows ``protocol.Drafter`` alone."""
