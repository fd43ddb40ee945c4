"""An audit in this process, without Spark."""
