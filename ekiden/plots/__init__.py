"""Charts as SVG, one string each, which load nothing from elsewhere.

Pure: numbers and names in, text out. No file, no page around it, no other room.
"""
