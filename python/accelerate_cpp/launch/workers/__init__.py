"""Workers that are programs of their own: starting, watching and ending them, here and on other machines."""
