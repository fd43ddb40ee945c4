"""The write-ahead receiver of queues that forget what they delivered, and the source that reads its log."""
