"""How a connection to MySQL or MariaDB is encrypted, verified and logged in."""
