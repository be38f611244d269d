"""The collective benchmark: schedules executed message by message, and libraries' own collectives next to them."""
