"""Devices and servers put together in one process, for tests, rehearsals and the demo."""
