"""How one model is trained by several processes: strategies, and the table that names them."""
