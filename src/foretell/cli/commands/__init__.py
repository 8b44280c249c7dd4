"""The commands, a file each: arguments in, the public API called, a table out."""
