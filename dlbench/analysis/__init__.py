"""Run folders become the numbers of one run, comparable groups and scaling points."""
