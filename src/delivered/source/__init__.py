"""What sources share: how much a batch reads, how it is split into slices, a message's columns. Pure."""
