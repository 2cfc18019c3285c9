"""Workers that are separate programs: starting, supervising and ending them, here and on other machines."""
