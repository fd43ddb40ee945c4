"""What sources share: what a batch takes, how it is cut into slices, which columns a message has. Pure."""
