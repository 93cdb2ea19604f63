"""Forecast the memory of a run before it starts: parts of each process, sums by device and host, flags that fit."""
