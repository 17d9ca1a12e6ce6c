"""The mask of a spec as a picture: its tiles by class, in the order in which they are visited."""
