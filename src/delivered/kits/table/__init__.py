"""What connectors to folders and tables of files share."""
