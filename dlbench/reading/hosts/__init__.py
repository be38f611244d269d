"""Hosts beside each other: which is slow, which leaves an exchange later, whose cores others used."""
