"""Provides tools around training (layer 6): the migration, the planner and the recorder. Nothing imports them."""
