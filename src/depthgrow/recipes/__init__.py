"""Recipes: functions that return a complete study, or a model to pretrain."""
