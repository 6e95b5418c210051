"""Use the operating system: files, memory, devices, network, signals."""
