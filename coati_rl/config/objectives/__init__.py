"""Define the sections that hold the settings of one objective each."""
