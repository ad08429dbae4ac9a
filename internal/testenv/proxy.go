package testenv

import (
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
	"time"
)

// Direction is one of the two ways through a [Proxy].
type Direction int

const (
	ToServer Direction = iota
	ToClient
)

// Proxy is a TCP link to a server that the test can break: cut, refuse, freeze without losing a
// byte, slow down. Safe for concurrent use.
type Proxy struct {
	URL string // the server's, with the proxy's address in place of its own

	upstream string
	listener net.Listener
	wg       sync.WaitGroup

	mu      sync.Mutex
	conns   map[net.Conn]struct{} // both ends of each link
	refuse  bool
	closed  bool
	delay   time.Duration
	allowed [2]int64         // bytes that may still pass in each direction; -1 is any number
	open    [2]chan struct{} // closed while the direction is open
}

// NewProxy starts a proxy to the server of a URL: postgres://, amqp:// or any other with a port. It
// ends with the test.
func NewProxy(t testing.TB, serverURL string) *Proxy {
	t.Helper()
	u, err := url.Parse(serverURL)
	if err != nil || u.Port() == "" {
		t.Fatalf("proxy: want a URL with a port")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{
		upstream: u.Host, listener: l,
		conns: make(map[net.Conn]struct{}), allowed: [2]int64{-1, -1},
		open: [2]chan struct{}{make(chan struct{}), make(chan struct{})},
	}
	close(p.open[ToServer])
	close(p.open[ToClient])
	u.Host = l.Addr().String()
	p.URL = u.String()
	p.wg.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Cut resets every connection; new ones work.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reset()
}

// Refuse resets every connection, and new ones as soon as they are made, until Resume.
func (p *Proxy) Refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = true
	p.reset()
}

// Stall lets nothing through any more in these directions, both if none is named, on connections old
// and new, which stay open: the peer has vanished. What was sent meanwhile arrives after Resume.
func (p *Proxy) Stall(directions ...Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(directions) == 0 {
		directions = []Direction{ToServer, ToClient}
	}
	for _, d := range directions {
		p.shut(d)
	}
}

// StallAfter is Stall for one direction once n more bytes have passed.
func (p *Proxy) StallAfter(d Direction, n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.allowed[d] = n
}

// Delay holds back each piece of data for this long, in both directions.
func (p *Proxy) Delay(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay = d
}

// Resume ends Refuse, Stall, StallAfter and Delay.
func (p *Proxy) Resume() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse, p.delay = false, 0
	p.allowed = [2]int64{-1, -1}
	for _, open := range p.open {
		select {
		case <-open:
		default:
			close(open)
		}
	}
}

// Connections returns how many clients are connected.
func (p *Proxy) Connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns) / 2
}

func (p *Proxy) close() {
	_ = p.listener.Close()
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.Cut()
	p.Resume() // releases those that wait
	p.wg.Wait()
}

// reset is called with the lock held.
func (p *Proxy) reset() {
	for c := range p.conns {
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // a reset, not an orderly end
		}
		_ = c.Close()
	}
}

// shut is called with the lock held.
func (p *Proxy) shut(d Direction) {
	select {
	case <-p.open[d]:
		p.open[d] = make(chan struct{})
	default: // is shut
	}
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.wg.Go(func() { p.link(client) })
	}
}

func (p *Proxy) link(client net.Conn) {
	server, err := net.DialTimeout("tcp", p.upstream, 5*time.Second)
	if err != nil {
		_ = client.Close()
		return
	}
	p.mu.Lock()
	p.conns[client], p.conns[server] = struct{}{}, struct{}{}
	if p.refuse || p.closed {
		p.reset()
	}
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.copy(ToServer, server, client) })
	both.Go(func() { p.copy(ToClient, client, server) })
	both.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, client)
	delete(p.conns, server)
}

// copy moves data until either end is gone, then closes both.
func (p *Proxy) copy(d Direction, to, from net.Conn) {
	defer func() {
		_ = to.Close()
		_ = from.Close()
	}()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		for sent := 0; sent < n; {
			pass := p.admit(d, n-sent)
			if _, err := to.Write(buf[sent : sent+pass]); err != nil {
				return
			}
			sent += pass
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				return
			}
			p.admit(d, 0) // the end of a stream is held up like its data
			return
		}
	}
}

// admit waits while the direction is shut, and returns how many of n bytes may pass now.
func (p *Proxy) admit(d Direction, n int) int {
	for {
		p.mu.Lock()
		open, delay := p.open[d], p.delay
		select {
		case <-open:
			if n > 0 && p.allowed[d] == 0 {
				p.shut(d)
				p.mu.Unlock()
				continue
			}
			if p.allowed[d] > 0 {
				n = int(min(int64(n), p.allowed[d]))
				p.allowed[d] -= int64(n)
			}
			p.mu.Unlock()
			time.Sleep(delay)
			return n
		default:
		}
		p.mu.Unlock()
		<-open
	}
}
