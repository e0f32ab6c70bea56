"""The laboratory: measures, draws and reports. Nothing that a user calls imports it."""
