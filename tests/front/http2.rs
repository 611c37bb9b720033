//! HTTP/2 with prior knowledge: its limits, its idle time and its drain.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::support::client::Client;
use crate::support::upstream::Upstream;
use crate::support::{Node, PATIENCE, config, eventually};

type Sender = SendRequest<Full<Bytes>>;

async fn connect(node: &Node) -> (Sender, JoinHandle<hyper::Result<()>>) {
    shake_hands(TcpStream::connect(node.address()).await.unwrap()).await
}

async fn shake_hands(stream: TcpStream) -> (Sender, JoinHandle<hyper::Result<()>>) {
    let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
    builder.max_header_list_size(1024 * 1024).max_frame_size(1024 * 1024);
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await.unwrap();
    (sender, tokio::spawn(connection))
}

fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(format!("http://proxy{path}")).body(Full::default()).unwrap()
}

async fn ask(sender: &mut Sender, request: Request<Full<Bytes>>) -> Response<Incoming> {
    timeout(PATIENCE, sender.send_request(request)).await.expect("an answer in time").unwrap()
}

async fn text(response: Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

#[tokio::test]
async fn streams_are_served_side_by_side_and_local_answers_are_the_same() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let (mut sender, _connection) = connect(&node).await;
    let waiting = tokio::spawn(sender.send_request(get("/channels/100000000000000001/a")));
    let arrival = upstream.next().await;
    assert_eq!(ask(&mut sender, get("/nirn/healthz")).await.status(), StatusCode::OK);
    let refused = ask(&mut sender, get("/nirn/nothing")).await;
    assert_eq!(refused.status(), StatusCode::NOT_FOUND);
    assert_eq!(refused.headers()["generated-by-proxy"], "true");
    let connect = Request::connect("discord.com:443").body(Full::default()).unwrap();
    assert_eq!(ask(&mut sender, connect).await.status(), StatusCode::BAD_REQUEST);
    arrival.ok("done").await;
    assert_eq!(text(waiting.await.unwrap().unwrap()).await, "done");
}

#[tokio::test]
async fn a_header_line_of_16_kib_passes_and_a_list_over_64_kib_is_431() {
    let node = Node::start(Upstream::echo().await);
    let (mut sender, _connection) = connect(&node).await;
    let long = |size: usize| {
        let request = Request::get("http://proxy/x").header("x-long", "x".repeat(size));
        request.body(Full::default()).unwrap()
    };
    assert_eq!(ask(&mut sender, long(16 * 1024)).await.status(), StatusCode::OK);
    let refused = ask(&mut sender, long(80 * 1024)).await;
    assert_eq!(refused.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    assert_eq!(refused.headers()["generated-by-proxy"], "true");
    assert!(text(refused).await.contains("64 KiB"));
    assert_eq!(node.failures("bad_request"), 1.0);
    assert_eq!(ask(&mut sender, long(200 * 1024)).await.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    assert_eq!(ask(&mut sender, get("/x")).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn an_idle_connection_is_closed_and_a_waiting_one_is_not() {
    let mut upstream = Upstream::start().await;
    let node = Node::start_with(config(upstream.address), |daemon| daemon.limits.idle = Duration::from_millis(800));
    let (mut sender, connection) = connect(&node).await;
    let waiting = tokio::spawn(sender.send_request(get("/x")));
    let arrival = upstream.next().await;
    tokio::time::sleep(Duration::from_millis(1_600)).await;
    arrival.ok("late").await;
    assert_eq!(text(waiting.await.unwrap().unwrap()).await, "late");
    let idle = Instant::now();
    timeout(PATIENCE, connection).await.expect("a close in time").unwrap().unwrap();
    assert!(idle.elapsed() >= Duration::from_millis(550), "{:?}", idle.elapsed());
}

#[tokio::test]
async fn a_drain_lets_a_stream_finish_and_then_closes_the_connection() {
    let mut upstream = Upstream::start().await;
    let mut node = Node::start(upstream.address);
    let (mut sender, connection) = connect(&node).await;
    let waiting = tokio::spawn(sender.send_request(get("/x")));
    let arrival = upstream.next().await;
    node.shut_down();
    let mut probe = Client::connect(node.address()).await;
    assert_eq!(probe.get("/nirn/healthz").await.status, 503);
    arrival.ok("finished").await;
    assert_eq!(text(waiting.await.unwrap().unwrap()).await, "finished");
    timeout(PATIENCE, connection).await.expect("a close in time").unwrap().unwrap();
    timeout(PATIENCE, node.task).await.expect("an end in time").unwrap().unwrap();
}

#[tokio::test]
async fn a_connection_made_right_before_the_drain_or_during_it_is_answered_and_closed() {
    let mut upstream = Upstream::start().await;
    let mut node = Node::start(upstream.address);
    let (mut sender, _connection) = connect(&node).await;
    let waiting = tokio::spawn(sender.send_request(get("/x")));
    let arrival = upstream.next().await;
    let silent = TcpStream::connect(node.address()).await.unwrap();
    // Connections are accepted in the order they were made in.
    assert_eq!(Client::connect(node.address()).await.get("/nirn/healthz").await.status, 200);
    node.shut_down();
    let draining = async { while Client::connect(node.address()).await.get("/nirn/healthz").await.status != 503 {} };
    timeout(PATIENCE, draining).await.expect("health says in time that it drains");
    let late = TcpStream::connect(node.address()).await.unwrap();
    for stream in [silent, late] {
        let (mut sender, connection) = shake_hands(stream).await;
        assert_eq!(ask(&mut sender, get("/nirn/healthz")).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        timeout(PATIENCE, connection).await.expect("a close in time").unwrap().unwrap();
    }
    assert!(!waiting.is_finished(), "the drain goes on");
    arrival.ok("finished").await;
    assert_eq!(text(waiting.await.unwrap().unwrap()).await, "finished");
}

#[tokio::test]
async fn what_is_left_after_the_drains_time_gets_503() {
    let mut upstream = Upstream::start().await;
    let mut node =
        Node::start_with(config(upstream.address), |daemon| daemon.limits.drain = Duration::from_millis(300));
    let (mut sender, _connection) = connect(&node).await;
    let waiting = tokio::spawn(sender.send_request(get("/x")));
    let _unanswered = upstream.next().await;
    node.shut_down();
    assert_eq!(waiting.await.unwrap().unwrap().status(), StatusCode::SERVICE_UNAVAILABLE);
    timeout(PATIENCE, node.task).await.expect("an end in time").unwrap().unwrap();
}

#[tokio::test]
async fn waiting_uploads_do_not_take_the_room_of_other_streams() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let (mut sender, _connection) = connect(&node).await;
    let post = |path: &str| {
        let request = Request::post(format!("http://proxy{path}"));
        request.body(Full::new(Bytes::from(vec![b'x'; 200_000]))).unwrap()
    };
    let first = tokio::spawn(sender.send_request(post("/channels/100000000000000001/messages")));
    let held = upstream.next().await;
    let waiting: Vec<_> =
        (0..40).map(|_| tokio::spawn(sender.send_request(post("/channels/100000000000000001/messages")))).collect();
    eventually("all wait", || node.open() == 41.0).await;
    let other = tokio::spawn(sender.send_request(post("/webhooks/200000000000000001/token")));
    upstream.next().await.ok("passed").await;
    assert_eq!(text(other.await.unwrap().unwrap()).await, "passed");
    waiting.iter().for_each(JoinHandle::abort);
    eventually("all but the first have left", || node.open() == 1.0).await;
    held.ok("done").await;
    assert_eq!(text(first.await.unwrap().unwrap()).await, "done");
    eventually("nothing is held", || node.open() == 0.0 && node.scheduler.is_quiet()).await;
}

#[tokio::test]
async fn a_client_that_withholds_its_window_past_the_deadline_is_cut_off() {
    let mut upstream = Upstream::start().await;
    let mut config = config(upstream.address);
    config.upstream.request_timeout = Duration::from_millis(500);
    config.scheduling.request_timeout = Duration::from_millis(500);
    let node = Node::start_with(config, |daemon| daemon.limits.idle = Duration::from_millis(800));
    let (mut sender, connection) = connect(&node).await;
    let waiting = tokio::spawn(sender.send_request(get("/x")));
    let size = 8 * 1024 * 1024;
    let arrival = upstream.next().await;
    arrival.write(format!("HTTP/1.1 200 OK\r\ncontent-length: {size}\r\n\r\n")).await;
    tokio::spawn(async move { while arrival.write(vec![b'x'; 256 * 1024]).await {} });
    let unread = waiting.await.unwrap().unwrap();
    timeout(PATIENCE, connection).await.expect("a close in time").unwrap().unwrap_err();
    eventually("nothing is held", || node.open() == 0.0).await;
    assert_eq!(node.failures("response_aborted"), 1.0);
    drop(unread);
}

#[tokio::test]
async fn a_connection_that_breaks_frees_everything_its_streams_held() {
    let mut upstream = Upstream::start().await;
    let node = Node::start(upstream.address);
    let stream = std::net::TcpStream::connect(node.address()).unwrap();
    stream.set_nonblocking(true).unwrap();
    let wire = stream.try_clone().unwrap();
    let stream = TokioIo::new(TcpStream::from_std(stream).unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake::<_, _, Full<Bytes>>(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    for path in ["/channels/100000000000000001/a", "/channels/100000000000000001/a", "/channels/100000000000000002/a"] {
        tokio::spawn(sender.send_request(get(path)));
    }
    let _unanswered = upstream.next().await;
    eventually("all are open", || node.open() == 3.0).await;
    wire.shutdown(std::net::Shutdown::Both).unwrap();
    eventually("all are counted", || node.failures("client_closed") == 3.0).await;
    eventually("nothing is open", || node.open() == 0.0).await;
}

#[tokio::test]
async fn an_upload_that_its_client_resets_never_looks_whole_to_discord() {
    let discord = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let node = Node::start(discord.local_addr().unwrap());
    let stream = TcpStream::connect(node.address()).await.unwrap();
    let (requests, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    for reason in [h2::Reason::CANCEL, h2::Reason::NO_ERROR].repeat(10) {
        let request = Request::post("http://proxy/channels/100000000000000001/messages").body(()).unwrap();
        let (_answer, mut upload) = requests.clone().ready().await.unwrap().send_request(request, false).unwrap();
        upload.send_data(Bytes::from_static(b"part"), false).unwrap();
        let (mut wire, _) = discord.accept().await.unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"4\r\npart\r\n") {
            assert!(timeout(PATIENCE, wire.read_buf(&mut seen)).await.expect("a part in time").unwrap() > 0);
        }
        upload.send_reset(reason);
        // However the connection ends: a last chunk would end the upload.
        timeout(PATIENCE, wire.read_to_end(&mut seen)).await.expect("an end in time").ok();
        let seen = String::from_utf8(seen).unwrap();
        assert!(seen.ends_with("4\r\npart\r\n"), "{reason}: {seen}");
    }
    eventually("all are counted", || node.failures("client_closed") == 20.0).await;
    connection.abort();
}

#[tokio::test]
async fn local_answers_to_head_have_no_body() {
    let node = Node::start(Upstream::echo().await);
    let stream = TcpStream::connect(node.address()).await.unwrap();
    // As strict as any client: hyper's own would not mind.
    let (requests, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    for (path, status) in [("/nirn/healthz", 200), ("/nirn/nothing", 404)] {
        let request = Request::head(format!("http://proxy{path}")).body(()).unwrap();
        let (answer, _) = requests.clone().ready().await.unwrap().send_request(request, true).unwrap();
        let answer = timeout(PATIENCE, answer).await.expect("an answer in time").unwrap();
        assert_eq!(answer.status(), status);
        assert_ne!(answer.headers()["content-length"], "0");
        assert!(answer.into_body().is_end_stream(), "{path}");
    }
    connection.abort();
}

#[tokio::test]
async fn a_client_that_does_not_read_one_answer_keeps_its_other_requests() {
    let mut upstream = Upstream::start().await;
    let mut config = config(upstream.address);
    config.upstream.request_timeout = Duration::from_millis(500);
    config.scheduling.request_timeout = Duration::from_millis(500);
    config.scheduling.queue_timeout = Duration::from_secs(20);
    let node = Node::start_with(config, |daemon| daemon.limits.idle = Duration::from_millis(800));
    let (mut sender, connection) = connect(&node).await;
    let unread = tokio::spawn(sender.send_request(get("/x")));
    let arrival = upstream.next().await;
    arrival.write("HTTP/1.1 200 OK\r\ncontent-length: 8000000\r\n\r\n").await;
    tokio::spawn(async move { while arrival.write(vec![b'x'; 256 * 1024]).await {} });
    let unread = unread.await.unwrap().unwrap();
    // Waits for its bucket for longer than the other may take.
    let closing = tokio::spawn(sender.send_request(get("/channels/100000000000000001/a")));
    let limits = "x-ratelimit-limit: 1\r\nx-ratelimit-remaining: 0\r\nx-ratelimit-reset-after: 5";
    let closed = upstream.next().await;
    closed.write(format!("HTTP/1.1 200 OK\r\n{limits}\r\ncontent-length: 0\r\n\r\n")).await;
    assert_eq!(closing.await.unwrap().unwrap().status(), StatusCode::OK);
    let waiting = tokio::spawn(sender.send_request(get("/channels/100000000000000001/a")));
    upstream.next().await.ok("patient").await;
    assert_eq!(text(waiting.await.unwrap().unwrap()).await, "patient");
    // Told to go, its end is no error.
    timeout(PATIENCE, connection).await.expect("a close in time").unwrap().ok();
    eventually("nothing is held", || node.open() == 0.0).await;
    assert_eq!(node.failures("response_aborted"), 1.0);
    drop(unread);
}
