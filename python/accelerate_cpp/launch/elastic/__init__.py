"""Runs on several machines that go on with fewer when some are lost, and with more when they come."""
