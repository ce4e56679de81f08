"""Import and export: one file for each foreign format. Each foreign library is imported when its format is used."""
