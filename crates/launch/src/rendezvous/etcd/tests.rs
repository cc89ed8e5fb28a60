use std::io::Write;
use std::net::TcpListener;
use std::thread;

use super::http::parse;
use super::*;

#[test]
fn a_call_ends_in_time_however_slowly_the_answer_comes() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port();
    thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        (0..3000).try_for_each(|_| {
            thread::sleep(Duration::from_millis(10));
            stream.write_all(b" ")
        })
    });
    let etcd = Etcd::new("127.0.0.1", port, Access::default(), Duration::from_millis(100));
    let why = etcd.get("key").unwrap_err().to_string();
    assert_eq!(why, format!("etcd at 127.0.0.1:{port}: it has not answered within 0.1 s"));
}

#[test]
fn answers_of_the_gateway_are_read() {
    let ok = |body: &str| parse(format!("HTTP/1.0 200 OK\r\nA: b\r\n\r\n{body}").as_bytes());
    let range = ok(r#"{"header":{"revision":"7"},"kvs":[{"key":"Zm9v","value":"YmFy"}],"count":"1"}"#).unwrap();
    assert_eq!(value(&range), Ok(Some("bar".to_owned())));
    assert_eq!(value(&ok(r#"{"header":{"revision":"7"}}"#).unwrap()), Ok(None));
    // Of a stream.
    let stream = ok("{\"result\":{\"TTL\":\"15\"}}\n{\"result\":{}}\n").unwrap();
    assert_eq!(stream.pointer("/result/TTL").unwrap(), "15");
    let why = |answer: &str| parse(answer.as_bytes()).unwrap_err();
    assert!(why("HTTP/1.1 404 Not Found\r\n\r\n").contains("etcd 3.4 or later"));
    assert_eq!(why("HTTP/1.1 503 Busy\r\n\r\nno leader\n"), "it has answered 503: no leader");
    assert!(why("SSH-2.0-OpenSSH\r\n\r\n").contains("does not speak HTTP"));
    assert!(why("").contains("does not speak HTTP"));
    assert!(why("HTTP/1.0 200 OK\r\n\r\n").contains("empty"));
    assert!(why("HTTP/1.0 200 OK\r\n\r\n<html>").contains("not JSON"));
    assert!(why("HTTP/1.0 200 OK\r\n\r\n{\"error\":\"etcdserver: no\"}").contains("no"));
}
