"""The only room that imports pyspark: formats, session, checkpoint. The composition root."""
