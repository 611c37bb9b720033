//! Health, refusals, keep-alive, pipelining, HTTP/2 and what a response looks like on its way back.

use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::support::client::Client;
use crate::support::upstream::Upstream;
use crate::support::{Node, PATIENCE, config, eventually};

async fn node_with_echo() -> Node {
    Node::start(Upstream::echo().await)
}

#[tokio::test]
async fn health_is_answered_for_get_and_head_and_never_counted_against_admission() {
    let mut upstream = Upstream::start().await;
    let mut config = config(upstream.address);
    config.max_in_flight_requests = 1;
    let node = Node::start_with(config, |_| {});
    let mut waiting = Client::connect(node.address()).await;
    waiting.send("GET /api/v10/gateway HTTP/1.1\r\nhost: proxy\r\n\r\n").await;
    let arrival = upstream.next().await;

    let mut client = Client::connect(node.address()).await;
    assert_eq!(client.get("/nirn/healthz").await.status, 200);
    client.send("HEAD /nirn/healthz HTTP/1.1\r\nhost: proxy\r\n\r\n").await;
    assert_eq!(client.answer_to("HEAD").await.status, 200);
    let refused = client.get("/api/v10/gateway").await;
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.header("x-nirn-proxy-error"), Some("true"));
    assert!(refused.text().contains("MAX_IN_FLIGHT_REQUESTS"));
    assert_eq!(node.failures("in_flight_limit"), 1.0);

    arrival.ok("done").await;
    assert_eq!(waiting.answer().await.text(), "done");
    client.send("GET /api/v10/gateway HTTP/1.1\r\nhost: proxy\r\n\r\n").await;
    upstream.next().await.ok("next").await;
    assert_eq!(client.answer().await.text(), "next");
}

#[tokio::test]
async fn reserved_paths_are_not_found_and_everything_else_goes_to_discord() {
    let node = node_with_echo().await;
    let mut client = Client::connect(node.address()).await;
    for path in ["/nirn/", "/nirn/other", "/nirn/healthz/"] {
        let answer = client.get(path).await;
        assert_eq!(answer.status, 404, "{path}");
        assert_eq!(answer.header("generated-by-proxy"), Some("true"));
    }
    client.send("POST /nirn/healthz HTTP/1.1\r\nhost: proxy\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 404);
    assert_eq!(node.failures("unknown_endpoint"), 4.0);
    for path in ["/metrics", "/debug/pprof/", "/nirn", "/nirnx"] {
        assert_eq!(client.get(path).await.text(), format!("GET {path} HTTP/1.1"));
    }
}

#[tokio::test]
async fn upgrades_and_connect_are_refused() {
    let node = node_with_echo().await;
    for request in [
        "CONNECT discord.com:443 HTTP/1.1\r\nhost: discord.com\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\nconnection: keep-alive, Upgrade\r\n\r\n",
        "GET / HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\n\r\n",
    ] {
        let mut client = Client::connect(node.address()).await;
        client.send(request).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, 400, "{request}");
        assert!(answer.text().contains("protocol upgrades are not proxied"), "{}", answer.text());
    }
    assert_eq!(node.failures("bad_request"), 4.0);
}

#[tokio::test]
async fn a_connection_is_kept_alive_and_pipelined_answers_come_in_order() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    let requests = ["/a", "/b", "/c"].map(|path| format!("GET {path} HTTP/1.1\r\nhost: proxy\r\n\r\n"));
    client.send(requests.concat()).await;
    for path in ["/a", "/b", "/c"] {
        let arrival = upstream.next().await;
        assert_eq!(arrival.line(), format!("GET {path} HTTP/1.1"));
        arrival.ok(path).await;
    }
    for path in ["/a", "/b", "/c"] {
        assert_eq!(client.answer().await.text(), path);
    }
    client.send("GET /d HTTP/1.1\r\nhost: proxy\r\n\r\n").await;
    upstream.next().await.ok("again").await;
    assert_eq!(client.answer().await.text(), "again");
    eventually("nothing open", || node.open() == 0.0).await;
}

#[tokio::test]
async fn http2_with_prior_knowledge_shares_the_port() {
    let node = node_with_echo().await;
    let stream = TcpStream::connect(node.address()).await.unwrap();
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    let ask = |path: &str| {
        let uri = format!("http://proxy{path}");
        let request = http::Request::post(uri).body(Full::new(Bytes::from_static(b"{}"))).unwrap();
        let mut sender = sender.clone();
        async move {
            let response = sender.send_request(request).await.unwrap();
            (response.status(), response.into_body().collect().await.unwrap().to_bytes())
        }
    };
    for (path, (status, body)) in [("/x", ask("/x").await), ("/y?z=1", ask("/y?z=1").await)] {
        assert_eq!(status, 200);
        assert_eq!(body, format!("POST {path} HTTP/1.1"));
    }
    assert_eq!(ask("/nirn/healthz").await.0, 404);
    drop(sender);
    connection.await.unwrap().unwrap();
    eventually("nothing open", || node.open() == 0.0).await;
    assert_eq!(node.failures("client_closed"), 0.0);
}

#[tokio::test]
async fn bodies_keep_their_framing_and_answers_without_a_body_end_at_their_head() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    let mut ask = async |method: &str, answer: &str| {
        client.send(format!("{method} /x HTTP/1.1\r\nhost: proxy\r\n\r\n")).await;
        upstream.next().await.write(answer).await;
        client.answer_to(method).await
    };
    let chunked = ask("GET", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n").await;
    assert_eq!((chunked.header("transfer-encoding"), chunked.text()), (Some("chunked"), "abc"));
    let known = ask("GET", "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc").await;
    assert_eq!((known.header("content-length"), known.text()), (Some("3"), "abc"));
    let head = ask("HEAD", "HTTP/1.1 200 OK\r\ncontent-length: 741\r\n\r\n").await;
    assert_eq!(head.header("content-length"), Some("741"));
    let empty = ask("DELETE", "HTTP/1.1 204 No Content\r\n\r\n").await;
    assert_eq!((empty.status, empty.header("content-length")), (204, None));
    let unchanged = ask("GET", "HTTP/1.1 304 Not Modified\r\netag: \"a\"\r\n\r\n").await;
    assert_eq!((unchanged.status, unchanged.header("etag")), (304, Some("\"a\"")));
    let nothing = ask("GET", "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!((nothing.header("content-length"), nothing.text()), (Some("0"), ""));
    eventually("nothing open", || node.open() == 0.0).await;
    assert_eq!(node.sum("nirn_proxy_failures_total", ""), 0.0);
}

#[tokio::test]
async fn a_body_is_asked_for_when_the_requests_turn_has_come() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    let head = "POST /channels/100000000000000001/messages HTTP/1.1\r\nhost: a\r\n";
    client.send(format!("{head}content-length: 4\r\nexpect: 100-continue\r\n\r\n")).await;
    assert!(client.head().await.unwrap().starts_with("HTTP/1.1 100 "));
    client.send("body").await;
    let arrival = upstream.next().await;
    assert_eq!(arrival.body, b"body");
    arrival.ok("done").await;
    assert_eq!(client.answer().await.text(), "done");
}

#[tokio::test]
async fn a_refusal_reaches_a_client_that_is_still_uploading() {
    let node = node_with_echo().await;
    for head in
        ["content-length: 3000000", "content-length: 3000000\r\nexpect: 100-continue", "transfer-encoding: chunked"]
    {
        let mut client = Client::connect(node.address()).await;
        client.send(format!("POST /nirn/upload HTTP/1.1\r\nhost: a\r\n{head}\r\n\r\n")).await;
        // Whether the node takes all of it or closes early is its business; its answer must arrive.
        let upload = [b"2dc6c0\r\n".as_slice(), &vec![b'x'; 300_000]].concat();
        _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, &upload).await;
        assert_eq!(client.answer().await.status, 404, "{head}");
    }
}

#[tokio::test]
async fn an_ipv6_wildcard_takes_ipv4_too() {
    let mut config = config(Upstream::echo().await);
    config.bind_ip = std::net::Ipv6Addr::UNSPECIFIED.into();
    // A machine without IPv6 has nothing to show here.
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        return;
    }
    let node = Node::start_with(config, |_| {});
    for host in ["127.0.0.1", "[::1]"] {
        let address = format!("{host}:{}", node.address().port()).parse().unwrap();
        assert_eq!(Client::connect(address).await.get("/nirn/healthz").await.status, 200, "{host}");
    }
}

#[tokio::test]
async fn a_request_reaches_discord_as_it_was_but_for_what_concerns_the_hop() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    let target = "/api/v10/channels/100000000000000001/messages/%F0%9F%91%8D//@me/?a=%20&b=?&";
    let head = [
        &format!("POST {target} HTTP/1.1"),
        "Host: proxy",
        "Connection: keep-alive, X-Private",
        "X-Private: hop",
        "X-Forwarded-For: 10.0.0.1",
        "X-Nirn-Hop: 1",
        "X-Audit-Log-Reason: caf%C3%A9",
        "X-Twice: one",
        "X-Twice: two",
        "Authorization: Bot  abc",
        "Content-Length: 4",
    ];
    client.send(head.join("\r\n") + "\r\n\r\nbody").await;
    let arrival = upstream.next().await;
    assert_eq!(arrival.line(), format!("POST {target} HTTP/1.1"));
    let mut lines: Vec<String> = arrival.head.lines().skip(1).map(str::to_lowercase).collect();
    lines.retain(|line| !line.is_empty() && !line.starts_with("user-agent: discordbot"));
    lines.sort();
    let host = format!("host: {}", upstream.address);
    let mut expected = vec![
        "authorization: bot  abc",
        "content-length: 4",
        host.as_str(),
        "x-audit-log-reason: caf%c3%a9",
        "x-twice: one",
        "x-twice: two",
    ];
    expected.sort_unstable();
    assert_eq!(lines, expected);
    assert_eq!(arrival.body, b"body");
    let answer = "HTTP/1.1 201 Created\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nconnection: x-hop\r\nx-hop: 1\r\n";
    arrival.write(format!("{answer}content-length: 2\r\n\r\n{{}}")).await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.text()), (201, "{}"));
    assert_eq!(answer.all("set-cookie").collect::<Vec<_>>(), ["a=1", "b=2"]);
    assert_eq!((answer.header("x-hop"), answer.header("connection")), (None, None));
}

#[tokio::test]
async fn an_http_1_0_client_is_answered_and_its_connection_closed() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let mut client = Client::connect(node.address()).await;
    client.send("GET /x HTTP/1.0\r\n\r\n").await;
    upstream.next().await.ok("done").await;
    let rest = client.rest_within(crate::support::PATIENCE).await.expect("a close");
    let text = String::from_utf8(rest).unwrap();
    assert!(text.starts_with("HTTP/1.0 200") && text.ends_with("\r\n\r\ndone"), "{text}");
}

#[tokio::test]
async fn a_health_probe_with_a_fragment_is_refused_like_any_request() {
    let node = Node::start(Upstream::echo().await);
    let mut client = Client::connect(node.address()).await;
    client.send("GET /nirn/healthz#x HTTP/1.1\r\nhost: a\r\n\r\nDELETE /a/#x HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let answer = client.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (400, Some("close")));
    assert_eq!(client.rest_within(PATIENCE).await.expect("a close"), b"", "what follows is not read");
}

#[tokio::test]
async fn a_connection_whose_bytes_cannot_be_followed_is_closed_when_idle() {
    let node =
        Node::start_with(config(Upstream::echo().await), |daemon| daemon.limits.idle = Duration::from_millis(400));
    // A trailer's line that has no end, as hyper takes it, after a body whose request was refused.
    let mut client = Client::connect(node.address()).await;
    client.send("POST /nirn/x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\na: b\n\nGET /").await;
    assert_eq!(client.answer().await.status, 404);
    assert!(client.rest_within(PATIENCE).await.is_some(), "a close");
}

#[tokio::test]
async fn an_answer_cut_off_to_an_http_1_0_client_ends_with_a_reset() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    for version in ["1.0", "1.1"] {
        let mut client = Client::connect(node.address()).await;
        client.send(format!("GET /x HTTP/{version}\r\nhost: a\r\n\r\n")).await;
        let arrival = upstream.next().await;
        arrival.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n").await;
        assert!(client.head().await.unwrap().contains(" 200 "));
        client.take(4).await.unwrap();
        arrival.cut().await;
        let mut rest = Vec::new();
        let ended = timeout(PATIENCE, client.stream.read_to_end(&mut rest)).await.expect("an end in time");
        if version == "1.0" {
            // Its end alone would be the body's.
            assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
        } else {
            assert!(!rest.ends_with(b"0\r\n\r\n"), "no last chunk");
        }
    }
    eventually("both are counted", || node.failures("response_aborted") == 2.0).await;
}
