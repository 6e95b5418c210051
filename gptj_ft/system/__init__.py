"""What is asked of the operating system, the network and memory."""
