// Shows the next bytes of an AXI stream, at any byte offset, and drops as many as it is told to
// (the paper's burst buffer). Bytes of several packets never mix: a packet begins with a beat.
//
// Four beats are held, so that bursts of 34 bytes, which may touch three beats, do not wait for the
// next beat. s_axis_tready does not depend on any other input of the same cycle.
module gw_byte_window #(
    parameter int USER_BITS = 1
) (
    input  logic                 clk,
    input  logic                 rst,
    input  logic [        255:0] s_axis_tdata,
    input  logic [         31:0] s_axis_tkeep,
    input  logic                 s_axis_tlast,
    input  logic [USER_BITS-1:0] s_axis_tuser,
    input  logic                 s_axis_tvalid,
    output logic                 s_axis_tready,

    output logic [        271:0] bytes,      // 34 bytes; those beyond `available` mean nothing
    output logic [          5:0] available,  // 0 to 34 bytes of the packet
    output logic                 ended,      // the packet has no bytes but these
    output logic                 broken,     // a tkeep that AXI streams of packets do not have
    output logic [USER_BITS-1:0] user,       // of the beat with the next byte
    output logic                 settled,    // more beats would not change the outputs above

    input logic       advance,
    input logic [5:0] take,     // drops these bytes, fewer than what the packet still has,
    input logic       take_all  // or all that are available, and with `ended` the packet's end
);
    // What is held. `count` beats from `head` on; the next byte is number `offset` of the first.
    logic [1023:0] data;
    logic [4*6-1:0] gaps;  // bytes that a beat lacks
    logic [3:0] lasts, brokens;
    logic [4*USER_BITS-1:0] users;
    logic [1:0] head;
    logic [2:0] count;
    logic [4:0] offset;

    // A tkeep selects the first bytes of a beat, and all of them but in the last beat. Only a packet
    // without any bytes may have a beat without bytes.
    logic midway;  // the last beat that came was not its packet's last
    logic [5:0] in_gap;
    wire hole = (s_axis_tkeep & (s_axis_tkeep + 32'd1)) != 32'd0;
    wire in_broken = hole || (!s_axis_tlast && !s_axis_tkeep[31]) || (midway && !s_axis_tkeep[0]);
    always_comb begin
        in_gap = 6'd0;
        if (s_axis_tlast) for (int i = 0; i < 32; i++) in_gap += {5'd0, !s_axis_tkeep[i]};
    end

    wire accept = s_axis_tvalid && s_axis_tready;
    wire [1:0] tail = head + count[1:0];
    assign s_axis_tready = count != 3'd4;
    always_ff @(posedge clk) begin
        for (int i = 0; i < 4; i++) begin
            if (accept && tail == i[1:0]) begin
                data[256*i+:256] <= s_axis_tdata;
                gaps[6*i+:6] <= in_gap;
                lasts[i] <= s_axis_tlast;
                brokens[i] <= in_broken;
                users[USER_BITS*i+:USER_BITS] <= s_axis_tuser;
            end
        end
        if (rst) midway <= 1'b0;
        else if (accept) midway <= !s_axis_tlast;
    end

    // The first three beats that are held, and which of them belong to the packet.
    logic [767:0] first;
    logic [3*6-1:0] first_gaps;
    logic [2:0] first_lasts, first_brokens;
    always_comb begin
        for (int i = 0; i < 3; i++) begin
            first[256*i+:256] = data[{head + i[1:0], 8'd0}+:256];
            first_gaps[6*i+:6] = gaps[{3'd0, head + i[1:0]}*5'd6+:6];
            first_lasts[i] = lasts[head+i[1:0]];
            first_brokens[i] = brokens[head+i[1:0]];
        end
    end
    wire [2:0] mine = {
        count > 3'd2 && first_lasts[1:0] == 2'd0, count > 3'd1 && !first_lasts[0], count > 3'd0
    };

    // A packet's last beat alone lacks bytes.
    wire has_last = (mine & first_lasts) != 3'd0;
    wire [5:0] gap = first_lasts[0] ? first_gaps[5:0]
        : first_lasts[1] ? first_gaps[11:6] : first_gaps[17:12];
    wire [6:0] held = mine[2] ? 7'd96 : mine[1] ? 7'd64 : mine[0] ? 7'd32 : 7'd0;
    wire [6:0] total = held - {2'd0, offset} - (has_last ? {1'b0, gap} : 7'd0);
    assign available = total > 7'd34 ? 6'd34 : total[5:0];
    assign ended     = has_last && total <= 7'd34;
    assign broken    = (mine & first_brokens) != 3'd0;
    assign settled   = available == 6'd34 || ended;
    assign user      = users[{1'b0, head}*USER_BITS+:USER_BITS];

    wire [767:0] shifted = first >> {offset, 3'd0};
    assign bytes = shifted[271:0];
    wire unused = &{1'b0, shifted[767:272]};

    // Beats whose bytes are all taken are dropped; with a packet's end, its last beat too.
    wire [6:0] position = {2'd0, offset} + {1'b0, take_all ? available : take};
    wire finish = take_all && ended;
    wire [1:0] dropped = !finish ? position[6:5]
        : first_lasts[0] ? 2'd1 : first_lasts[1] ? 2'd2 : 2'd3;
    always_ff @(posedge clk) begin
        if (rst) begin
            head   <= 2'd0;
            count  <= 3'd0;
            offset <= 5'd0;
        end else begin
            count <= count + {2'd0, accept} - (advance ? {1'b0, dropped} : 3'd0);
            if (advance) begin
                head   <= head + dropped;
                offset <= finish ? 5'd0 : position[4:0];
            end
        end
    end
endmodule
