"""Answers like a served model in a state that the test names in a file: MODE_FILE PORT. Standard library only."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MODE, PORT = Path(sys.argv[1]), int(sys.argv[2])
INFO = {
    "version": "0.5.16",
    "model_path": "/m/target",
    "speculative_algorithm": "DFLASH",
    "port": PORT,
    "grammar_backend": "xgrammar",
    "internal_states": [{}],
}


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def send(self, status, data):
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        mode = MODE.read_text()
        if mode == "hang":
            time.sleep(60)
        if mode == "not-http":
            self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
            return
        if mode == "auth" and self.headers.get("Authorization") != "Bearer right":
            return self.send(401, {"error": "Unauthorized"})
        if self.path == "/health":
            return self.send(503 if mode == "starting" else 200, b"")
        if self.path == "/server_info":
            change = {"drift": {"model_path": "/m/other"}, "ignored-mask": {"speculative_algorithm": "DDTREE"}}
            return self.send(200, {**INFO, **change.get(mode, {})})
        self.send(404, b"")

    def do_POST(self):
        mode = MODE.read_text()
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if mode == "crash":
            return self.send(500, {"error": {"message": "Internal Server Error"}})
        if self.path == "/v1/tokenize":
            return self.send(404, b"") if mode == "old" else self.send(200, {"tokens": [1, 2, 3]})
        if asked.get("stream") and asked.get("return_meta_info"):
            return self.send(400, {"message": "return_meta_info is not supported with streaming."})
        if asked.get("stream") and self.path == "/generate":
            self.send_response(200)
            self.end_headers()
            for count, text in ((3, " co"), (12, " cold.")):
                time.sleep(0.01)
                meta = {"completion_tokens": count, "spec_verify_ct": 4, "spec_num_correct_drafts": 8}
                meta["spec_correct_drafts_histogram"] = [0, 1, 2, 1]
                event = {"text": text, "meta_info": meta}
                self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.write(b"data: [DONE]\n\n")
            return None
        if asked.get("stream"):
            self.send_response(200)
            self.end_headers()
            for piece in (" co", "ld."):
                choice = {"text": piece, "delta": {"content": piece}}
                self.wfile.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if mode != "cut":
                self.wfile.write(b"data: [DONE]\n\n")
            return None
        texts = {
            "garbage": " xq zz",
            "repeat": " a a a a a a a a a a",
            "gibberish": " \ufffd\ufffd q\ufffd \ufffd\ufffd",
        }
        text = texts.get(mode, " cold.")
        sampling = asked.get("sampling_params") or {}
        for stop in sampling.get("stop") or () if mode != "ignores-stop" else ():
            text = text[: text.index(stop)] if stop in text else text
        if "regex" in sampling and mode != "ignores-grammar":
            return self.send(400, {"error": {"message": "grammars are not supported with DFLASH"}})
        rows = {
            "collapsed": (12, 0, [12]),
            "decay": (60, 90, [10, 10, 20, 20, 0, 0, 0, 0]),
            "shifted": (40, 32, [20, 10, 8, 2]),
        }
        steps, accepted, histogram = rows.get(mode, (4, 8, [0, 1, 2, 1]))
        meta = {
            "completion_tokens": 12,
            "spec_verify_ct": steps,
            "spec_num_correct_drafts": accepted,
            "spec_correct_drafts_histogram": histogram,
        }
        if mode == "ignored-mask":
            meta["spec_chain_accept_length"] = 3.5
        self.send(200, {"text": text, "meta_info": {"completion_tokens": 12} if mode == "no-spec" else meta})


ThreadingHTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
