//! A stand-in for etcd: what an election needs of its JSON gateway. Its leases end when a test says so.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};

#[derive(Default)]
struct State {
    /// Values and leases by key, in base64 as they come.
    keys: HashMap<String, (String, String)>,
    leases: Vec<String>,
    granted: usize,
    is_down: bool,
}

pub struct FakeEtcd {
    pub port: u16,
    state: Arc<Mutex<State>>,
}

impl FakeEtcd {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let state: Arc<Mutex<State>> = Arc::default();
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(stream, &shared));
            }
        });
        Self { port, state }
    }

    /// Ends all leases, as when node 0 has not renewed its own.
    pub fn expire(&self) {
        let mut state = self.state.lock().unwrap();
        state.keys.clear();
        state.leases.clear();
    }

    /// Whether it answers nothing any more.
    pub fn set_down(&self, is_down: bool) {
        self.state.lock().unwrap().is_down = is_down;
    }

    pub fn has_keys(&self) -> bool {
        !self.state.lock().unwrap().keys.is_empty()
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>) -> Option<()> {
    let mut reader = BufReader::new(&stream);
    let (mut path, mut length) = (String::new(), 0);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let line = line.trim();
        if line.is_empty() {
            break;
        }
        if let Some(rest) = line.strip_prefix("POST ") {
            path = rest.split(' ').next()?.to_owned();
        }
        if let Some(number) = line.strip_prefix("Content-Length: ") {
            length = number.parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let answer = answer(&path, &serde_json::from_slice(&body).ok()?, &mut state.lock().unwrap())?;
    (&stream).write_all(format!("HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{answer}\n").as_bytes()).ok()
}

fn answer(path: &str, request: &Value, state: &mut State) -> Option<Value> {
    if state.is_down {
        return None;
    }
    let text = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
    let range = |state: &State, key: &str| match state.keys.get(key) {
        Some((value, _)) => json!({"header": {}, "kvs": [{"key": key, "value": value}], "count": "1"}),
        None => json!({"header": {}}),
    };
    Some(match path {
        "/v3/kv/range" => range(state, &text(request, "key")),
        "/v3/lease/grant" => {
            state.granted += 1;
            let id = (7_587_000_000_000_000_000 + state.granted).to_string();
            state.leases.push(id.clone());
            json!({"header": {}, "ID": id, "TTL": text(request, "TTL")})
        }
        "/v3/lease/keepalive" => {
            let id = text(request, "ID");
            let held = state.leases.contains(&id);
            if held { json!({"result": {"ID": id, "TTL": "10"}}) } else { json!({"result": {"ID": id}}) }
        }
        "/v3/lease/revoke" => {
            let id = text(request, "ID");
            state.leases.retain(|lease| *lease != id);
            state.keys.retain(|_, (_, lease)| *lease != id);
            json!({"header": {}})
        }
        "/v3/kv/txn" => {
            let put = request.pointer("/success/0/request_put")?;
            let (key, value, lease) = (text(put, "key"), text(put, "value"), text(put, "lease"));
            let taken = state.keys.get(&key).map(|_| range(state, &key));
            match taken {
                Some(range) => json!({"header": {}, "responses": [{"response_range": range}]}),
                None => {
                    state.keys.insert(key, (value, lease));
                    json!({"header": {}, "succeeded": true, "responses": [{"response_put": {}}]})
                }
            }
        }
        _ => return None,
    })
}
