"""What watches over the source tree; no part of the product."""
