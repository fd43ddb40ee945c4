"""What connectors of one kind share: `sql` databases, `table` formats and files, message `queue` systems."""
