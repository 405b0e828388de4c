"""An HTTP server of this process, while a test needs it."""

import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer


@contextmanager
def listening(handler):
    """The root under which `handler` answers, at a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
