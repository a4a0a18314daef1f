"""Algorithms over a study: each asks a question, looks at the result, and asks the next one."""
