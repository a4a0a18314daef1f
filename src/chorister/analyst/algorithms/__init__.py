"""Algorithms as functions over a study: each asks, looks, and asks again."""
