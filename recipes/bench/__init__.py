"""Measures a running server under the user's own traffic: what do its users wait, and what does speculation change?"""
