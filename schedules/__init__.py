"""Frozen schedules, one folder a device and one JSON file a problem, and the search spaces."""
