"""Stand-ins for group robots of WeCom, DingTalk and Feishu, and for a webhook, on loopback.

Each refuses what the real one refuses by its documentation, with its error code: a wrong key or signature, and what is
too large. The signatures are computed here anew, not by the relay's code.
"""

import base64
import hashlib
import hmac
import http.server
import json
import threading
import time
import urllib.parse

PATHS = {
    "wecom": "/wecom?key=wecom-key",
    "dingtalk": "/dingtalk?access_token=ding-token",
    "feishu": "/feishu",
    "webhook": "/webhook",
}


class Robots(http.server.ThreadingHTTPServer):
    """The four of them: `taken` and `refused` are (kind, body), `times` when each was taken (Unix seconds)."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.secret = "SEC-of-the-robot"
        self.taken, self.times, self.refused = [], [], []
        self.answers = []
        """(status, body) with which the next requests are answered, whatever they are."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def url(self, kind):
        return f"http://127.0.0.1:{self.server_address[1]}{PATHS[kind]}"

    def texts(self):
        """The text of each message that was taken."""
        return [text_of(kind, body) for kind, body in self.taken]

    def stop(self):
        self.shutdown()
        self.server_close()


def text_of(kind, body):
    if kind == "wecom":
        return body["markdown"]["content"]
    if kind == "dingtalk":
        return body["markdown"]["text"]
    return body["card"]["elements"][0]["content"] if kind == "feishu" else body["text"]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        content = self.rfile.read(int(self.headers["content-length"]))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        kind = url.path.strip("/")
        body = json.loads(content)
        if self.server.answers:
            status, answer = self.server.answers.pop(0)
        else:
            code = getattr(self, f"_{kind}")(query, body, content)
            status, answer = 200, {"code" if kind == "feishu" else "errcode": code}
            if code:
                self.server.refused.append((kind, body))
            else:
                self.server.times.append(time.time())
                self.server.taken.append((kind, body))
        answer = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _wecom(self, query, body, content):
        if query.get("key") != "wecom-key":
            return 93000
        return 40058 if body["msgtype"] != "markdown" or len(body["markdown"]["content"].encode()) > 4096 else 0

    def _dingtalk(self, query, body, content):
        """Signed in the URL: HMAC-SHA256 of "<ms>\\n<secret>" with the secret as key; an hour old at most."""
        stamp, secret = query["timestamp"], self.server.secret
        wanted = hmac.new(secret.encode(), f"{stamp}\n{secret}".encode(), hashlib.sha256).digest()
        known = query.get("access_token") == "ding-token" and abs(time.time() * 1000 - int(stamp)) <= 3_600_000
        if not known or base64.b64decode(query["sign"]) != wanted:
            return 310000
        return 460101 if not body["markdown"]["title"] or len(content) > 20_000 else 0

    def _feishu(self, query, body, content):
        """Signed in the body: HMAC-SHA256 of nothing with "<s>\\n<secret>" as key."""
        wanted = hmac.new(f"{body['timestamp']}\n{self.server.secret}".encode(), b"", hashlib.sha256).digest()
        if base64.b64decode(body["sign"]) != wanted:
            return 19021
        return 11246 if body["msg_type"] != "interactive" or len(content) > 20_000 else 0

    def _webhook(self, query, body, content):
        return 0

    def log_message(self, *_):
        pass
