"""Planted faults: does the checker catch what is wrong on purpose, and name it?"""
