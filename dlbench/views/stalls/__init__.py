"""Input stalls by difference: the same plan with synthetic data, with a warm page cache, and with a cold one."""
