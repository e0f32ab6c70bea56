"""Which keys a query sees. A pattern is one idea: whatever computes, counts or sends attention asks it.

pattern    what every pattern answers
union      several patterns in one softmax
"""
