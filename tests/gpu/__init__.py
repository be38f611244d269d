"""What a GPU must prove; `pytest -m gpu` runs it where there is one."""
