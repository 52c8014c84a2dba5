"""Generated gRPC stubs and what every server and client needs: health, drain, deadlines, auth.

No torch and no business rules: a message goes in and a message comes out.
"""
